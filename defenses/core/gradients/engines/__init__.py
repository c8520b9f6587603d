"""Per-example gradient engines besides the layerwise engine, interchangeable up to rounding."""
