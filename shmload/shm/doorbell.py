import posix_ipc
class Doorbell:
    def __init__(self,s,name,owner): self.s=s; self.name=name; self.owner=owner
    @classmethod
    def create(cls,name): return cls(posix_ipc.Semaphore(name,posix_ipc.O_CREX,0o600,0),name,True)
    @classmethod
    def attach(cls,name): return cls(posix_ipc.Semaphore(name),name,False)
    def post(self): self.s.release()
    def wait(self,t):
        try: self.s.acquire(t); return True
        except posix_ipc.BusyError: return False
    def drain(self):
        while self.wait(0): pass
    def post_up_to(self,n):
        for _ in range(n-self.s.value): self.s.release()
    def close(self):
        if self.owner: self.s.unlink(); self.owner=False
        self.s.close()
