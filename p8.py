src=open('/tmp/h/ppdocs-scratch/p1.py').read()
exec(src[:src.index("@probe\ndef base")])
# minimal: a constant in x
def init(k,x): return {"k":0.3*jax.random.normal(k,(8,16,16)),"o":jnp.ones((16,4))*.1}
@probe
def bool_mask():
    def ap(p,x,pipeline=sequential):
        return pipeline(lambda k,t:{"x":t["x"]+jnp.where(t["m"],jnp.tanh(t["x"]@k),0),"m":t["m"]},p["k"],{"x":x,"m":jnp.ones(16,bool)})["x"]@p["o"]
    return run(jaxcoll.pipelined((init,ap)))
@probe
def closure_mask_instead():
    def ap(p,x,pipeline=sequential):
        m=jnp.ones(16,bool)
        return pipeline(lambda k,x:x+jnp.where(m,jnp.tanh(x@k),0),p["k"],x)@p["o"]
    return run(jaxcoll.pipelined((init,ap)))
@probe
def lm_donated_twice_v():
    p=jaxcoll.ParallelPlan({"data":8}); s=p.init(SimpleClassifier(4),optax.sgd(.1),key,batch); st=p.build_train_step()
    st(s,batch); return st(s,batch)[1]
