import os, secrets, itertools
from shmload.shm.doorbell import Doorbell
from shmload.shm.segment import Segment
_n=itertools.count()
class Group:
    def __init__(self):
        self.stem=f"shmload-{os.getuid()}-{secrets.token_hex(4)}-{next(_n)}"; self.all=[]
    def segment(self, part, nbytes, slots=None):
        s=Segment(f"{self.stem}-{part}", nbytes); self.all.append(s); return s
    def doorbell(self, part):
        b=Doorbell.create(f"/{self.stem}-{part}"); self.all.append(b); return b
    def close(self):
        for x in self.all: x.close()
        self.all=[]
