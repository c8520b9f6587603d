"""Examples of the owner's own: read, told apart by content, and compared group with group."""
