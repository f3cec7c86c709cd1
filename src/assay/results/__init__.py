"""Records: measured rows with everything needed to repeat them, and the folder that keeps them."""
