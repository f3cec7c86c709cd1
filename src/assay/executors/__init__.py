"""Where tasks run: in this process, or in several on this machine."""
