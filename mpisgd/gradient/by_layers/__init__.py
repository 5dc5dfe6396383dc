"""Gradients exchanged by slices, or buckets, as passes reach and leave the layers."""
