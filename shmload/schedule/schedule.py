import numpy as np
class Schedule:
    def __init__(self,n,batch_size,*,seed,shuffle,drop_last=False,uneven="pad",world_size=1):
        self.n=n; self.b=batch_size; self.s=seed; self.sh=shuffle
        self.num_steps=n//batch_size if drop_last else -(-n//batch_size)
    def num_steps_of(self,rank): return self.num_steps
    def batch(self,epoch,step,rank):
        p=np.random.default_rng([self.s,epoch]).permutation(self.n) if self.sh else np.arange(self.n)
        return p[step*self.b:(step+1)*self.b].astype(np.int64)
    def num_valid(self,step,rank): return min(self.b,self.n-step*self.b)
