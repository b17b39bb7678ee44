-- Stores the calls in `asked` whose fence is open and whose key is new, and opens the fences that are not there yet.
-- Returns the keys of those that were stored.
--
-- What another transaction holds exclusively is passed over: no call waits for another rollout's freeze.
-- Scalar subqueries, since without statistics a planner would turn EXISTS into a scan of the table.
WITH {asked},
rollouts AS MATERIALIZED (
    SELECT DISTINCT ON (run, rollout_id) run, rollout_id, lock_number, opening_id, {written_at} AS at, written_by
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
opened AS (
    INSERT INTO fences (run, rollout_id, state, version, incomplete, opened_at)
    SELECT run, rollout_id, 'open', 0, false, at
    FROM turns r
    WHERE taken AND (SELECT 1 FROM fences f WHERE f.run = r.run AND f.rollout_id = r.rollout_id) IS NULL
    ORDER BY run, rollout_id
    ON CONFLICT DO NOTHING
    RETURNING run, rollout_id
),
opening AS (
    INSERT INTO snapshot_versions
        (run, rollout_id, version, event, event_id, model_call_id, recorded_at, written_by)
    SELECT run, rollout_id, 0, 'open', opening_id, '', at, written_by
    FROM opened JOIN rollouts USING (run, rollout_id)
),
writable AS (
    SELECT run, rollout_id FROM locked WHERE state = 'open'
    UNION ALL SELECT run, rollout_id FROM opened
),
stored AS (
    INSERT INTO {table} ({columns})
    SELECT {columns}
    FROM asked JOIN writable USING (run, rollout_id)
    WHERE {condition}
    ORDER BY run, rollout_id, model_call_id
    ON CONFLICT DO NOTHING
    RETURNING run, rollout_id, model_call_id
),
durable AS MATERIALIZED (SELECT {durable_commit})
SELECT stored.* FROM durable CROSS JOIN stored
