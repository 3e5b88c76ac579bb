"""Plans of families of models, one file each: ``plan(config)`` of a configuration of transformers, without torch.

They are components of the kind ``tensor_family``, named as transformers names the ``model_type``. A plan speaks of the
model with its head (``LlamaForCausalLM``); :func:`zoo.tensor.plan_of` fits it to the model at hand.
"""
