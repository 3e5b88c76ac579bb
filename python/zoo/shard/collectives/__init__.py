"""How the bytes of a bucket travel: gathers and reductions behind two small protocols."""
