BEGIN TRANSACTION;
CREATE TABLE calls (
	id VARCHAR(200) NOT NULL, 
	trajectory_id VARCHAR(200) NOT NULL, 
	idempotency_key VARCHAR(300), 
	model VARCHAR(200) NOT NULL, 
	step INTEGER NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	late BOOLEAN NOT NULL, 
	started_at DOUBLE NOT NULL, 
	ended_at DOUBLE NOT NULL, 
	prompt_ids BLOB NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id), 
	CONSTRAINT calls_idempotency UNIQUE (trajectory_id, idempotency_key)
);
INSERT INTO "calls" VALUES('c-0','both',NULL,'planner',2,'complete',0,1.0,2.0,X'010000000200000003000000','{"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0},"constrained":null,"messages":[{"role":"user","content":"hi"}],"tools":null,"origin":null,"error":null}');
INSERT INTO "calls" VALUES('c-1','both',NULL,'writer',5,'complete',0,2.0,3.0,X'010000000200000003000000','{"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0},"constrained":null,"messages":[{"role":"user","content":"hi"}],"tools":null,"origin":null,"error":null}');
INSERT INTO "calls" VALUES('c-2','open',NULL,'planner',3,'complete',0,3.0,4.0,X'010000000200000003000000','{"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0},"constrained":null,"messages":[{"role":"user","content":"hi"}],"tools":null,"origin":null,"error":null}');
INSERT INTO "calls" VALUES('c-3','held-out',NULL,'planner',3,'complete',0,4.0,5.0,X'010000000200000003000000','{"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0},"constrained":null,"messages":[{"role":"user","content":"hi"}],"tools":null,"origin":null,"error":null}');
INSERT INTO "calls" VALUES('c-4','silent',NULL,'planner',2,'failed',0,5.0,6.0,X'010000000200000003000000','{"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0},"constrained":null,"messages":[{"role":"user","content":"hi"}],"tools":null,"origin":null,"error":null}');
INSERT INTO "calls" VALUES('c-5','running',NULL,'planner',3,'complete',0,6.0,7.0,X'010000000200000003000000','{"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0},"constrained":null,"messages":[{"role":"user","content":"hi"}],"tools":null,"origin":null,"error":null}');
INSERT INTO "calls" VALUES('c-6','both',NULL,'critic',9,'complete',1,20.0,21.0,X'010000000200000003000000','{"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"min_p":0.0},"constrained":null,"messages":[{"role":"user","content":"hi"}],"tools":null,"origin":null,"error":null}');
CREATE TABLE logs (
	id INTEGER NOT NULL, 
	model VARCHAR(200) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "logs" VALUES(1,'planner',1.79536933503521800039e+09,'{"split":"val","step":3,"metrics":{"val/reward":0.5},"trajectory_ids":["held-out","both"]}');
INSERT INTO "logs" VALUES(2,'writer',1.79536933503968429565e+09,'{"split":"val","step":3,"metrics":{"val/reward":0.5},"trajectory_ids":["held-out","both"]}');
CREATE TABLE meta (
	"key" VARCHAR(64) NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY ("key")
);
INSERT INTO "meta" VALUES('schema','1');
CREATE TABLE outputs (
	call_id VARCHAR(200) NOT NULL, 
	choice INTEGER NOT NULL, 
	claimed_by VARCHAR(200), 
	status VARCHAR(16) NOT NULL, 
	finish_reason VARCHAR(64), 
	token_ids BLOB NOT NULL, 
	logprobs BLOB NOT NULL, 
	message TEXT NOT NULL, 
	PRIMARY KEY (call_id, choice)
);
INSERT INTO "outputs" VALUES('c-0',0,'both','complete','stop',X'0700000008000000',X'000000BF0000C07F','{"role":"assistant","content":"é"}');
INSERT INTO "outputs" VALUES('c-1',0,'both','complete','stop',X'0700000008000000',X'000000BF0000C07F','{"role":"assistant","content":"é"}');
INSERT INTO "outputs" VALUES('c-2',0,'named','complete','stop',X'0700000008000000',X'000000BF0000C07F','{"role":"assistant","content":"é"}');
INSERT INTO "outputs" VALUES('c-3',0,'held-out','complete','stop',X'0700000008000000',X'000000BF0000C07F','{"role":"assistant","content":"é"}');
INSERT INTO "outputs" VALUES('c-5',0,NULL,'complete','stop',X'0700000008000000',X'000000BF0000C07F','{"role":"assistant","content":"é"}');
INSERT INTO "outputs" VALUES('c-6',0,NULL,'complete','stop',X'0700000008000000',X'000000BF0000C07F','{"role":"assistant","content":"é"}');
CREATE TABLE trains (
	id VARCHAR(200) NOT NULL, 
	model VARCHAR(200) NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	created_at DOUBLE NOT NULL, 
	status TEXT NOT NULL, 
	request TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "trains" VALUES('train-planner','planner','done',1.7953693350051209926e+09,'{"id":"train-planner","model":"planner","state":"done","result":{"model":"planner","step":4,"applied":true,"reason":"trained","metrics":{},"checkpoint":null,"request_id":"train-planner","warnings":[]},"error":null}','{"id":"train-planner","model":"planner","groups":[{"trajectory_ids":["named"],"metadata":{},"metrics":{}},{"trajectory_ids":["both","silent","lost"],"metadata":{"scenario_id":"blue"},"metrics":{}}],"config":{"learning_rate":0.00001,"loss":"grpo","epsilon":0.2,"epsilon_high":null,"scale_rewards":true,"sequence":"trajectory","kl_coef":0.0,"importance_cap":2.0,"max_tokens":2048,"epochs":1,"minibatches":1,"max_grad_norm":1.0,"warmup_updates":0,"betas":[0.9,0.99],"weight_decay":0.0,"min_group_size":2,"layout":"auto","row_tokens":16384,"logits_chunk":512,"overlap":false,"max_staleness":1,"kl_warn":0.02,"seed":0}}');
INSERT INTO "trains" VALUES('train-writer','writer','done',1.79536933502263665197e+09,'{"id":"train-writer","model":"writer","state":"done","result":{"model":"writer","step":4,"applied":true,"reason":"trained","metrics":{},"checkpoint":null,"request_id":"train-writer","warnings":[]},"error":null}','{"id":"train-writer","model":"writer","groups":[{"trajectory_ids":["named"],"metadata":{},"metrics":{}},{"trajectory_ids":["both","silent","lost"],"metadata":{"scenario_id":"blue"},"metrics":{}}],"config":{"learning_rate":0.00001,"loss":"grpo","epsilon":0.2,"epsilon_high":null,"scale_rewards":true,"sequence":"trajectory","kl_coef":0.0,"importance_cap":2.0,"max_tokens":2048,"epochs":1,"minibatches":1,"max_grad_norm":1.0,"warmup_updates":0,"betas":[0.9,0.99],"weight_decay":0.0,"min_group_size":2,"layout":"auto","row_tokens":16384,"logits_chunk":512,"overlap":false,"max_staleness":1,"kl_warn":0.02,"seed":0}}');
CREATE TABLE trajectories (
	id VARCHAR(200) NOT NULL, 
	model VARCHAR(200) NOT NULL, 
	explicit BOOLEAN NOT NULL, 
	reward DOUBLE, 
	ended_at DOUBLE NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "trajectories" VALUES('both','planner',0,1.0,11.0,'{"id":"both","model":"planner","calls":null,"histories":[],"reward":1.0,"metrics":{},"metadata":{"scenario_id":"blue"},"logs":[],"exception":null,"weights":{},"unused":[],"started_at":1.0,"ended_at":11.0}');
INSERT INTO "trajectories" VALUES('silent','planner',0,NULL,12.0,'{"id":"silent","model":"planner","calls":null,"histories":[],"reward":null,"metrics":{},"metadata":{"scenario_id":"blue"},"logs":[],"exception":{"type":"ValueError","message":"away","traceback":"..."},"weights":{},"unused":[],"started_at":1.0,"ended_at":12.0}');
INSERT INTO "trajectories" VALUES('lost','planner',1,NULL,13.0,'{"id":"lost","model":"planner","calls":[],"histories":[],"reward":null,"metrics":{},"metadata":{},"logs":[],"exception":{"type":"ValueError","message":"away","traceback":"..."},"weights":{},"unused":[],"started_at":1.0,"ended_at":13.0}');
INSERT INTO "trajectories" VALUES('named','planner',1,0.25,14.0,'{"id":"named","model":"planner","calls":[{"call_id":"c-2","index":0}],"histories":[],"reward":0.25,"metrics":{},"metadata":{},"logs":[],"exception":null,"weights":{},"unused":[],"started_at":1.0,"ended_at":14.0}');
INSERT INTO "trajectories" VALUES('held-out','planner',0,0.5,15.0,'{"id":"held-out","model":"planner","calls":null,"histories":[],"reward":0.5,"metrics":{},"metadata":{"scenario_id":7},"logs":[],"exception":null,"weights":{},"unused":[],"started_at":1.0,"ended_at":15.0}');
INSERT INTO "trajectories" VALUES('alone','planner',0,NULL,9.0,'{"id":"alone","model":"planner","calls":null,"histories":[],"reward":null,"metrics":{},"metadata":{},"logs":[],"exception":null,"weights":{},"unused":[],"started_at":1.0,"ended_at":9.0}');
CREATE INDEX outputs_claimed ON outputs (claimed_by) WHERE claimed_by IS NOT NULL;
CREATE INDEX trajectories_model ON trajectories (model, ended_at);
CREATE INDEX logs_model ON logs (model);
COMMIT;
