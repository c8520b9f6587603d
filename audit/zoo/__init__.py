"""The zoo: trained checkpoints by name, each with its claim, its split and outputs of shadow models, for new attacks.

`leakbench.zoo` is its public name. Nothing here trains; `audit/run/checkpoints.py` writes checkpoints.
"""
