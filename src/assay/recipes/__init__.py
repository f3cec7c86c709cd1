"""Complete studies as small Python functions with a name: the name alone repeats the result."""
