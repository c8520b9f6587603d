"""Per-example gradient engines beside the layerwise one, interchangeable up to rounding."""
