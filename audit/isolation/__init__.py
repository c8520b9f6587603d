"""Attacks of others in a process of their own, which is given the target and never the truth.

`worker.py` and `answers.py` are of the process with the private data, `child.py` and `questions.py` of the attack's.
"""
