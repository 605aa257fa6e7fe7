import sys,os,time,threading,collections
sys.path.insert(0,os.getcwd())
from pathlib import Path
import tempfile
from tests.e2e.job import run_job, smoke_command
from tests.e2e.conftest import make_task
import psutil
t0=time.time(); task=make_task("--tied") if False else None
import tests.e2e.conftest as c
import inspect
src=inspect.getsource(c)
def build():
    return make_task(*sys.argv[2].split(",")) if len(sys.argv)>2 else make_task()
task=build(); print("task",round(time.time()-t0,1),task)
cpu={};first={};name={}
stop=threading.Event()
def poll():
    me=psutil.Process()
    while not stop.wait(0.4):
        for p in psutil.process_iter():
            try:
                t=p.cpu_times(); n=' '.join(p.cmdline())[:90]
                if p.create_time()<t0: continue
            except psutil.Error: continue
            if 'cc1plus' in n and p.pid not in cpu: print('CC', ' | '.join(' '.join(q.cmdline())[:200] for q in p.parents()[:5]), flush=True)
            cpu[p.pid]=t.user+t.system; name[p.pid]=n; first.setdefault(p.pid,time.time()-t0)
th=threading.Thread(target=poll); th.start()
folder=Path(tempfile.mkdtemp())
t1=time.time()
job=run_job(smoke_command("async_strategy=on_policy",f"trainer.total_training_steps={sys.argv[1]}",f"trainer.v1.async_pipeline.run_dir={folder/'run'}"),folder/'run',task)
t2=time.time(); stop.set(); th.join()
print(job.output[-3000:] if job.status else "", job.status,"wall",round(t2-t1,1),"cpu",round(sum(cpu.values()),1))
agg=collections.Counter();cnt=collections.Counter()
for p,v in cpu.items():
    k=name[p].split(' -')[0][:60]; agg[k]+=v; cnt[k]+=1
for k,v in agg.most_common(22): print("%6.1f %3d %s"%(v,cnt[k],k))
