"""Code that numba has compiled, kept in the user's cache for the processes that follow."""
