"""A model that was trained elsewhere: its file, its data, the attacks on it, and what they show.

Nothing of the training was executed here, so nothing of it is proved: a claim is what its owner states, and what is
measured can refute it and never confirm it.
"""
