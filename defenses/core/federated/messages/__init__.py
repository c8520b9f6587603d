"""Messages of clients: their form, their codecs, and the plans that they follow from."""
