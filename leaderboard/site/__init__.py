"""Static site of a board: a front page, and a page for each suite, defense, attack, row and submission."""
