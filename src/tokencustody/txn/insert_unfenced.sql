-- Stores the calls in `asked` whose key is new, wherever no freeze has come before, whether or not there is a fence.
-- Returns the keys of those that were stored. See insert_fenced.sql.
WITH {asked},
rollouts AS MATERIALIZED (
    SELECT DISTINCT ON (run, rollout_id) run, rollout_id, lock_number
    FROM asked
    ORDER BY run, rollout_id
),
turns AS MATERIALIZED (
    SELECT *, pg_try_advisory_xact_lock_shared(lock_number) AS taken
    FROM rollouts
    WHERE (SELECT set_config('lock_timeout', '{patience}', true)) IS NOT NULL
),
locked AS MATERIALIZED (
    SELECT r.run, r.rollout_id, fence.state
    FROM turns r
    CROSS JOIN LATERAL (
        SELECT state FROM fences f
        WHERE r.taken AND f.run = r.run AND f.rollout_id = r.rollout_id
        FOR SHARE SKIP LOCKED
    ) fence
),
-- A rollout that has no fence yet, and gets and freezes it while this statement runs, began before that freeze had
-- returned.
writable AS (
    SELECT run, rollout_id FROM locked WHERE state <> 'frozen'
    UNION ALL SELECT run, rollout_id
    FROM turns r
    WHERE taken AND (SELECT 1 FROM fences f WHERE f.run = r.run AND f.rollout_id = r.rollout_id) IS NULL
),
stored AS (
    INSERT INTO {table} ({columns})
    SELECT {columns}
    FROM asked JOIN writable USING (run, rollout_id)
    ORDER BY run, rollout_id, model_call_id
    ON CONFLICT DO NOTHING
    RETURNING run, rollout_id, model_call_id
),
durable AS MATERIALIZED (SELECT {durable_commit})
SELECT stored.* FROM durable CROSS JOIN stored
