"""Where truth lives: the store protocol, its implementations, and the records kept in it."""
