"""Pure functions of arrays: what `import rope_jax` gives."""
