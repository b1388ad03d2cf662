"""Networks and losses on back ends other than plain torch: Keras on torch, TensorFlow and JAX."""
