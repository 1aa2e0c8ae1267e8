"""What happened: pictures and messages go in, `Trace -> Branch -> TrainingSample -> MicroBatch` come out."""
