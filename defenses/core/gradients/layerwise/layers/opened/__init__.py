"""Modules that compute several linear products in a function of their own, as linear layers in their place."""
