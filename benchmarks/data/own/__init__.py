"""Users' own data, by kind and path: `folder:PATH`. Each file here is a kind; adding a file needs no other edit.

Suites call the function of a file's name, which deals pools. Audits call `read_examples`, which returns the examples as
stored; they know a file by its first bytes, `STARTS`, and the size that it declares is checked before that much is
read. No reader loads a pickle, and each refuses in a single sentence.
"""
