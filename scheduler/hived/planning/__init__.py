"""Where a gang can go, decided on a tentative copy."""
