"""`rcfarm status | node | brake | doctor | audit`: commands about the whole fleet."""
