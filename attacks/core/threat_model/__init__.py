"""Threat models: access, side knowledge and control of an attacker, and the decorator that declares them."""
