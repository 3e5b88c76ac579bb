"""AutoTP under DeepSpeed's names: layers, descriptions of how a model is cut, ``tp_model_init``."""
