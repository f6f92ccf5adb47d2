def sample_key(seed,epoch,index,stream=0): return hash((seed,epoch,index,stream,"x")) & (2**64-1)
