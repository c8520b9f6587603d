"""Third parties' attacks in processes of their own, which receive the target and never the ground truth.

`worker.py` and `answers.py` run in the process with the private data, `child.py` and `questions.py` in the attack's.
"""
