"""What a cluster needs: the check of a machine, and batch scripts."""
