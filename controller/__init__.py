"""The controller of cosmos-launch: the one process that holds the state of a job, and decides what replicas do next.

    rollout replicas, trainers, launcher, people
         │ HTTP
    api          who may call, bounds on requests, routes: bytes in, bytes out
         │ one service for each route file, of the same name
    services     what a call does: checks, one synchronous change of the state, waiting, the answer
         │
    state        one job: `Job` holds all parts and knows its phase; replicas, publications, validation, steps
         │
    ledger       pure: the groups of a GRPO job (`GroupTable`), and what may happen to them (`Ledger`)
    autoscale    pure: how many rollout replicas the job needs
         │
    store        Redis: `Job.stage` names what changed, one transaction at a time writes it, then the call is answered

Also here: `dashboard` (pages for a browser, and run directories without a job), `client` (what other packages
import), `data` (datasets to indexed files, before a job), `server` (the process), `notify` (long polls), `errors`
(what is raised).

All paths below begin with /v1, except health, metrics and /docs; decisions are in modules of `ledger` and `state`:

| call                            | what changes                          | service          | decided in            |
|---------------------------------|---------------------------------------|------------------|-----------------------|
| POST /replicas                  | registered; trainer: epoch, rewind    | replicas         | replicas, checkpoint  |
| POST /replicas/by-name/…/exited | replica lost; groups wait, or poison  | replicas         | ledger                |
| POST /replicas/…/heartbeat      | last seen; leases renewed, released   | replicas         | replicas, ledger      |
| POST /replicas/…/declare        | what the store lost of a trainer      | recovery         | reconcile             |
| POST /replicas/…/leases         | leases that the store lost come back  | replicas         | rejoin                |
| POST /replicas/…/member         | who trains which parts; what is held  | trainers.members | membership            |
| POST /replicas/…/drain          | replica drains                        | replicas         | replicas              |
| POST /replicas/…/profile        | a profile; heartbeats hand it on      | replicas         | replicas              |
| POST /replicas/…/turn           | who has memory on devices in common   | replicas         | time_share            |
| DELETE /replicas/…              | replica left; its groups wait         | replicas         | replicas, job         |
| POST /leases                    | groups leased; a validation begins    | leases           | admission, validation |
| DELETE /leases/…                | group: leased → waiting               | leases           | ledger                |
| POST /samples                   | its group is ready, waits, is dropped | samples          | ledger, reward_health |
| POST /groups/…/samples/…        | the same, for one sample              | samples          | ledger, reward_health |
| POST /publications              | publication; old files go; round due  | publications     | publications          |
| GET /publications/latest        | what this replica was handed          | publications     | publications          |
| POST /publications/…/reports    | report; a full version is requested   | publications     | update_reports        |
| GET /steps/…/batch              | groups: ready → batched; late: drop   | trainers.steps   | assembly              |
| POST /steps/…/commit            | groups: batched → trained; job ends   | trainers.steps   | ledger, job           |
| POST /steps/…/replay            | groups: any state → trained           | recovery         | rejoin                |
| POST /checkpoints               | groups: trained → durable             | trainers.steps   | checkpoint            |
| POST /replicas/meetings/…       | where the ranks of a replica meet     | replicas         |                       |
| POST /job/…                     | paused, ended, reopened, checkpoint   | job              | job                   |
| POST /autoscale                 | rollout replicas that there should be | autoscale        | autoscaler            |
| GET /job, /groups               | nothing                               | job              | group_table           |
| GET /replicas                   | nothing                               | replicas         | replicas              |
| GET /autoscale                  | nothing                               | autoscale        |                       |
| GET /replicas/meetings/…        | nothing                               | replicas         |                       |
| GET /ledger, /groups/…          | nothing                               | (routes)         | group_table           |
| GET /samples, /samples/…        | nothing                               | samples          |                       |
| GET /publications               | nothing                               | publications     | publications          |
| GET /steps, /validations        | nothing                               | (routes)         | step_log, validation  |
| GET /checkpoints/…/ledger       | nothing                               | (routes)         | checkpoint            |
| GET /events                     | nothing                               | events           | event_log             |
| /session                        | nothing: a token becomes a cookie     | (routes)         |                       |
| GET /overview, /curves          | nothing                               | dashboard        | step_log              |
| GET /timeline, /scaling         | nothing                               | dashboard        |                       |
| GET /samples/steps              | nothing                               | dashboard        |                       |
| GET /logs, /logs/…              | nothing                               | dashboard        |                       |
| /config, /config/…              | nothing                               | (routes)         |                       |
| /openapi.json, /metrics, /docs  | nothing                               | (routes)         |                       |
| /healthz, /readyz               | nothing                               | (routes)         |                       |
| GET /proof                      | nothing: what the controller proves   | proof            |                       |
| every half second               | leases expire, replicas are lost;     | reaper           | ledger, replicas,     |
|                                 | their number is decided               |                  | autoscale             |
"""
