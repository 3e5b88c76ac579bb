"""What behaves otherwise than in DeepSpeed under the same name: (what, how). ``docs/migration.md`` lists it."""

from __future__ import annotations

BEHAVIOUR: tuple[tuple[str, str], ...] = (
    (
        "checkpoints",
        "are written in zoo's format, which any number of ranks and any stage read; DeepSpeed's own and "
        "universal ones are read too. `load_checkpoint` returns the folder of the checkpoint. `zoo ckpt export`"
        " and `zero_to_fp32.py`, which lies beside them, make plain weights.",
    ),
    (
        "`client_state`",
        "is each rank's own, as there; at another world size a rank that there was not gets rank 0's. It "
        "holds plain values, tensors, arrays, namespaces, paths and times, and gives them back exactly; "
        "anything else is refused when it is saved, because no file is unpickled. Subclasses of int, float and str "
        "(members of enums, `torch.__version__`) come back as these, parameters as tensors. `load_checkpoint` gives "
        "back what was put in, and no keys of its own.",
    ),
    (
        "`load_checkpoint`",
        "restores `micro_steps`; a schedule that is loaded sets its rate at once, also with "
        "`load_optimizer_states=False`.",
    ),
    (
        "`state_dict()` of partitioned parameters (stage 3)",
        "has tensors of the right shape without memory (device meta) where DeepSpeed has empty ones; reading "
        "their values raises. `save_pretrained` without `state_dict=` is refused there, on all ranks; DeepSpeed "
        "writes the empty ones.",
    ),
    (
        "values that are not on this rank",
        "raise PartitionedAccessError where something is computed with a partitioned parameter, its `p.data` "
        "or its `p.detach()`, which have the whole shape; DeepSpeed computes with empty tensors. `p.grad` is None "
        "where the gradient is partitioned, "
        "in both.",
    ),
    (
        "what is taken inside of `GatheredParameters`",
        "keeps the values of then, as in DeepSpeed; zoo.zero's own refuses it afterwards.",
    ),
    (
        "`safe_set_full_fp32_param`",
        "changes the model's parameter at once; in DeepSpeed the next step does.",
    ),
    (
        "several `backward()` before one `step()` without accumulation",
        "add up at every stage; DeepSpeed's stages 1 to 3 do not step along their sum.",
    ),
    (
        "`loss.backward()` without the engine",
        "raises where `gradient_accumulation_steps` is no power of two: gradients are divided where they arrive, which "
        "gives the bits of a divided loss by powers of two only. `engine.backward(loss)` takes any number. Under fp16 "
        "it raises, as in DeepSpeed, but for `engine.scale(loss).backward()`; and where an engine part changes the "
        "loss (`moe.balance_coefficient`), which it would leave out.",
    ),
    (
        "`step(lr_kwargs=...)`",
        "is refused where there is no schedule; DeepSpeed does nothing with them there.",
    ),
    (
        "`torch.autograd.grad(outputs, inputs, create_graph=True)` (gradient penalties, forces)",
        "computes what torch does at stages 0 to 2 and raises at stage 3. `backward(create_graph=True)`, which adds "
        "gradients that have a graph to those of parameters, raises at every stage.",
    ),
    (
        "learning rates, other options of `param_groups` and `train_batch_size` that come to differ by rank",
        "are an error of the step on all ranks, which names them; DeepSpeed updates each rank's part with its own.",
    ),
    (
        "sequences that ranks share (`UlyssesSPAttentionHF`)",
        "give the gradient of the mean over all ranks at every stage, as DeepSpeed's stages 0 and 3; its stages 1 and "
        "2 have a norm that is larger by the number of ranks that share one.",
    ),
    (
        "parameters that are frozen after `initialize`",
        "go on by momentum and decay at every stage, as in DeepSpeed's stages 1 to 3.",
    ),
    (
        "a dynamic loss scale",
        "doubles after `loss_scale_window` good steps, in DeepSpeed after one more at first and after an overflow.",
    ),
    (
        "`Train/Samples/lr` of monitors",
        "is the rate that the step used; in DeepSpeed the next one's.",
    ),
    (
        "initialize() of a model that an engine has",
        "ends that engine, with a warning; in DeepSpeed both go on.",
    ),
    (
        "curriculum schedules",
        "begin at the smallest difficulty and end at the largest, also where `difficulty_step` does not divide them.",
    ),
    (
        "`p.partition(has_been_updated=True)`",
        "is refused: it does not say whose values count. `deepspeed.zero.GatheredParameters` is told who writes.",
    ),
    (
        "`ReduceLROnPlateau` without a metric",
        'is refused: give `engine.step(lr_kwargs={"metrics": loss})`. DeepSpeed gives it the batch size, so that the '
        "rate falls.",
    ),
    (
        "parameters in no group of the optimizer",
        "are frozen by `initialize`, with a warning: they have no gradient and count as frozen in checkpoints.",
    ),
    (
        "`engine.optimizer`",
        "is a view of zoo's optimizer at every stage, at stage 0 in fp32 too, where `isinstance` and `==` take it for "
        "the one that it wraps; `engine.optimizer.optimizer` is for `isinstance` DeepSpeed's class of the name in the "
        "configuration (FusedAdam, with offload DeepSpeedCPUAdam); `param_groups` hold the model's parameters, not "
        "flat fp32 tensors; the keys of `state_dict()` are zoo's. Groups cannot be added.",
    ),
    (
        "attributes that a program sets",
        "`optimizer.clip_grad`, `optimizer.cur_scale`, `engine.training_dataloader`, `engine.lr_scheduler` and the "
        "counts are obeyed. Others of which something would follow in DeepSpeed (`engine.gradient_clipping`, "
        "`optimizer.overlap_comm`, `optimizer.micro_step_id`, `engine.module`, `engine._config.x`) are an "
        "AttributeError that says what does it. Names of the program's own are kept, and methods may be wrapped.",
    ),
    (
        "`get_global_grad_norm()` at stage 0 in fp32",
        "is a number; DeepSpeed has None.",
    ),
    (
        "clipping at stage 0 in fp32, where ranks have different layers or experts",
        "is by the norm of the whole model, as at all other stages; DeepSpeed clips by the norm of what a rank has.",
    ),
    (
        "`gradient_clipping`",
        "is 1.0 where the configuration does not say, as in DeepSpeed 0.19.8; zoo.engine's own default is no clipping.",
    ),
    (
        "the configuration",
        "is checked: keys that contradict each other, and options that nobody carries out, are a ConfigError (a"
        " ValueError) with a sentence. What becomes of each key is on [its page](reference/configuration.md); "
        "what the compiler would offload is refused.",
    ),
    (
        "`pin_memory` of `offload_optimizer` and `offload_param`",
        "is false where it is not given, as the documents (0.14.1) say; DeepSpeed 0.19.8 has true. No number depends "
        "on it.",
    ),
    (
        "optimizers that DeepSpeed has not tested",
        "are tried at construction, and run under ZeRO where they can, whether `zero_allow_untested_optimizer` is true "
        "or not given; an explicit false is an error for them, an AssertionError too. What needs whole parameters "
        "runs at stage 0 and in one process, and is refused elsewhere.",
    ),
    (
        "learning-rate schedules",
        "`WarmupLR` rises to the optimizer's own rate where `warmup_max_lr` is not given or null, as in DeepSpeed "
        "0.19.8; its documents (0.14.1) say 0.001. `state_dict()` has `last_step` and `base_rates`, and "
        "`load_state_dict` takes DeepSpeed's `last_batch_iteration` too.",
    ),
    (
        "`MoE`",
        "has zoo.moe's names of parameters, which those of DeepSpeed's checkpoints get when they are loaded; "
        "consecutive ranks share the experts. A forward without `initialize` wants "
        "`set_deepspeed_parallelism()` where `ep_size` is above 1.",
    ),
    (
        "pipelines",
        "`initialize` returns a loader of one epoch, which `train_batch` repeats; `micro_steps` counts micro-batches.",
    ),
    (
        "arguments that cannot be",
        "are a ValueError with a sentence in many places where DeepSpeed has an AssertionError, a RuntimeError or a "
        "TypeError.",
    ),
    (
        "`engine.half()`, `.bfloat16()`, `.to()` after `initialize`",
        "are refused: parameters lie in flat buffers.",
    ),
    (
        "`enable_backward_allreduce = False`",
        "raises: `step()` reduces what backward has not; `coalesce_grad_reduction()` puts it off, and `no_sync()` at "
        "stages 0 and 1.",
    ),
)
