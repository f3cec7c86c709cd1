"""What the models are trained on: captioned images, text, and the order in which a training sees them."""
