"""From results to figures: which panels, and the words around them. What draws is in `figures`."""
