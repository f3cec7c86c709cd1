"""How wrong may an implementation be? As wrong as its format makes a plain one, times a small factor."""
