"""Threat models: what an attack needs to be given, and the decorator that declares it."""
