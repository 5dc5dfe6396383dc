"""Push and pull at the same time: a link carries gradients one way while it carries weights the other."""
