"""Membership inference: likelihood ratios, shadow models and their statistics."""
