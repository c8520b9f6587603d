"""Users' own data, by kind and path: `folder:PATH`. Each file here is a kind; adding a file needs no other edit.

Suites call the function of the file's name, which deals pools. Audits call `read_examples`, which returns the examples
as stored; they recognise a format by the first bytes of a file, `STARTS`, and check the size that a file declares
before reading it. No reader loads a pickle, and every refusal is a single sentence.
"""
