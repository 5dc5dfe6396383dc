"""A gradient whose slices, or buckets, are told one by one, as its passes reach and leave the layers."""
