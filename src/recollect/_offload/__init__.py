"""Values that live elsewhere, in host memory or on disk, until backward needs them."""
