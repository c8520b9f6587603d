"""Claims of the papers that computing can check: each measured on our own plans and engine, beside a closed form.

A claim is one function with the decorator `claim`, in the file of its subject; `claims.py` lists the files.
"""
