"""Papers' claims that computation can check: each measured on our own plans and engine, against a closed form.

A claim is a function with the decorator `claim`, in the file of its subject; `claims.py` lists the files.
"""
