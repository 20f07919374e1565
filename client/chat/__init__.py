"""`peraxis chat`: conversations with one variant, or with two at the same time."""
