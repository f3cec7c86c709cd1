"""What a person looks at; it only reads rows, and needs no torch."""
