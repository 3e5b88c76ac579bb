"""Every option of ZeRO: what a ds_config may say, the keywords of the constructors, and how arguments are checked."""
