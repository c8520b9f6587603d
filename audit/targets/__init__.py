"""Targets: the view of an executed training step that an attacker is given."""
