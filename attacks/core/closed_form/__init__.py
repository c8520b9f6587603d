"""Closed forms: inputs and labels from the equations of a layer, without a search."""
