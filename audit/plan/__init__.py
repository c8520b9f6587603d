"""From a suite to cells: typed requests, and the models, data and defenses that they name."""
