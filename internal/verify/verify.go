// Package verify checks the books: it recomputes what must be there from the
// orders, compares it with what is there, and names each difference.
//
// It may run while the pipeline works. All that concerns an order is read in one
// snapshot, and no order is called wrong that was seen wrong only once. A missing
// effect is lost when the pipeline is known to be past its event, waits in a dead
// letter when there is an open one, and is in flight otherwise. Orders are read
// in pages, a short transaction each, so memory does not grow with their number.
//
// Behind billing it looks at the topic ledger.balances, whose balances have to be
// the ledger's once they have caught up.
//
// It writes nothing. What it cannot see: what left no trace in the orders' own
// tables.
package verify

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/postgres"
)

const (
	consumer        = "billing"
	maxSuspectPages = 5    // so many pages of orders wait for their second look, at most
	maxStrays       = 1000 // so many are counted of what cannot be
)

// Config says what to verify. All but DB may be left out.
type Config struct {
	DB       *pgxpool.Pool
	Slot     string        // the relay's; onceledger_outbox
	Wait     time.Duration // at most so long for what is in flight
	PageSize int           // orders read at once; 2,000
	Progress func(orders int64)

	// Lag asks how far the consumer has committed each partition of
	// order.events, and where each ends.
	Lag func(ctx context.Context) (committed, end map[int32]int64, err error)

	// Topic is where the balances are to be compared too.
	Topic *Topic
}

// run is one verification under way.
type run struct {
	Config

	queries  *db.Queries
	report   *Report
	accounts map[account]*Balance
	suspects []suspect
	deadline time.Time
	seen     int64
}

// account is one of a tenant's. Their number is all that memory grows with.
type account struct {
	tenantID       uuid.UUID
	currency, code string
}

// suspect is an order that did not look right at its first look. What it was
// missing then, it was missing up to this version.
type suspect struct {
	key     db.VerifyKeyListRow
	version int64
}

// Run verifies everything. An error says that it could not be done; that the
// books are wrong is in the Report.
func Run(ctx context.Context, config Config) (*Report, error) {
	config.Slot = cmp.Or(config.Slot, "onceledger_outbox")
	config.PageSize = cmp.Or(config.PageSize, 2000)
	r := &run{Config: config, queries: db.New(), report: newReport(), accounts: make(map[account]*Balance)}

	seesAll, err := r.queries.VerifySeesAll(ctx, r.DB)
	if err != nil {
		return nil, fmt.Errorf("look at the schema: %w", err)
	}
	if !seesAll {
		return nil, errors.New("this login sees only one tenant's orders: use onceledger_verify")
	}
	if err := r.scan(ctx); err != nil {
		return nil, err
	}
	if err := r.whole(ctx); err != nil {
		return nil, err
	}
	r.balance()
	if err := r.topic(ctx); err != nil {
		return nil, err
	}
	return r.report, nil
}

// snapshot runs fn in a transaction that sees one moment and writes nothing.
func (r *run) snapshot(ctx context.Context, fn func(tx pgx.Tx) error) error {
	return postgres.InTxOptions(ctx, r.DB, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, fn)
}

// scan looks at every order once, and at those that did not look right again.
func (r *run) scan(ctx context.Context) error {
	var after db.VerifyKeyListRow
	for {
		var keys []db.VerifyKeyListRow
		var page []*examination
		err := r.snapshot(ctx, func(tx pgx.Tx) (err error) {
			keys, err = r.queries.VerifyKeyList(ctx, tx, after.TenantID, after.OrderID, int32(r.PageSize))
			if err == nil {
				page, err = r.examine(ctx, tx, keys)
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("read orders: %w", err)
		}
		for i, x := range page {
			if len(x.found)+len(x.waiting) == 0 {
				r.tally(x)
			} else {
				r.suspects = append(r.suspects, suspect{keys[i], x.version()})
			}
		}
		if r.seen += int64(len(page)); r.Progress != nil {
			r.Progress(r.seen)
		}

		last := len(keys) < r.PageSize
		if last || len(r.suspects) >= maxSuspectPages*r.PageSize {
			if err := r.settle(ctx); err != nil {
				return err
			}
		}
		if last {
			return nil
		}
		after = keys[len(keys)-1]
	}
}

// examine reads the books of the orders: one examination for each, in order.
func (r *run) examine(ctx context.Context, tx pgx.Tx, keys []db.VerifyKeyListRow) ([]*examination, error) {
	tenants, orders := make([]uuid.UUID, len(keys)), make([]uuid.UUID, len(keys))
	for i, key := range keys {
		tenants[i], orders[i] = key.TenantID, key.OrderID
	}
	horizon, err := r.queries.VerifyOutboxHorizon(ctx, tx)
	if err != nil {
		return nil, err
	}
	rows, err := r.queries.VerifyBooks(ctx, tx, consumer, tenants, orders)
	if err != nil {
		return nil, err
	}
	page := make([]*examination, len(rows))
	for i, row := range rows {
		b, err := fromRow(row)
		if err != nil {
			return nil, err
		}
		page[i] = examine(b, horizon)
	}
	return page, nil
}

// settle looks at the suspects again until each is right, is surely wrong, or
// the pipeline has passed everything that they were missing: then that is lost.
// When the time is up before, it is in flight.
//
// The second look is for wrong ones too. A commit reaches the relay a moment
// before others see it, so an effect can be seen before its cause.
func (r *run) settle(ctx context.Context) error {
	if r.deadline.IsZero() {
		r.deadline = time.Now().Add(r.Wait)
	}
	var mark watermark
	for pause := 50 * time.Millisecond; len(r.suspects) > 0; pause = min(2*pause, time.Second) {
		passed, err := r.passed(ctx, &mark)
		if err != nil {
			return fmt.Errorf("ask how far the pipeline is: %w", err)
		}
		last := passed || !time.Now().Before(r.deadline)
		if err := r.lookAgain(ctx, passed, last); err != nil || last {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(pause, time.Until(r.deadline))):
		}
	}
	return nil
}

// lookAgain keeps as suspects those that still wait for something, unless it is
// the last look.
func (r *run) lookAgain(ctx context.Context, passed, last bool) error {
	var left []suspect
	for suspects := range slices.Chunk(r.suspects, r.PageSize) {
		var page []*examination
		keys := make([]db.VerifyKeyListRow, len(suspects))
		for i, s := range suspects {
			keys[i] = s.key
		}
		err := r.snapshot(ctx, func(tx pgx.Tx) (err error) {
			page, err = r.examine(ctx, tx, keys)
			return err
		})
		if err != nil {
			return fmt.Errorf("look at orders again: %w", err)
		}
		for i, x := range page {
			lost, inFlight := x.judge(passed, suspects[i].version)
			if inFlight > 0 && !last {
				left = append(left, suspects[i])
				continue
			}
			r.tally(x)
			r.report.add(x.found...)
			r.report.add(lost...)
			r.report.InFlight += inFlight
		}
	}
	r.suspects = left
	return nil
}

// tally counts an order, once, and adds its ledger entries to the balances.
func (r *run) tally(x *examination) {
	report := r.report
	if x.Order != nil {
		report.Orders.Total++
		switch x.Order.Status {
		case "created":
			report.Orders.Created++
		case "paid":
			report.Orders.Paid++
		case "cancelled":
			report.Orders.Cancelled++
		}
		if len(x.Refunds) > 0 {
			report.Orders.Refunded++
		}
	}
	report.Refunds += int64(len(x.Refunds))
	report.Invoices += int64(len(x.Invoices))
	report.CreditNotes += int64(len(x.CreditNotes))
	report.LedgerEntries += int64(len(x.Entries))

	for _, e := range x.Entries {
		for _, line := range e.Lines {
			r.account(x.TenantID, line.Currency, line.Debit).Debit += line.Amount
			r.account(x.TenantID, line.Currency, line.Credit).Credit += line.Amount
		}
	}
	if x.due != (amounts{}) {
		r.account(x.TenantID, x.Order.Currency, ledger.Cash).Recomputed += x.due.Total
		r.account(x.TenantID, x.Order.Currency, ledger.Revenue).Recomputed -= x.due.Net
		r.account(x.TenantID, x.Order.Currency, ledger.TaxPayable).Recomputed -= x.due.Tax
	}
}

func (r *run) account(tenantID uuid.UUID, currency, code string) *Balance {
	key := account{tenantID, currency, code}
	if r.accounts[key] == nil {
		r.accounts[key] = new(Balance)
	}
	return r.accounts[key]
}

// balance makes the trial balance. A sum that is too large for 64 bits wraps on
// both sides alike, so that a difference still shows.
func (r *run) balance() {
	keys := slices.SortedFunc(maps.Keys(r.accounts), func(a, b account) int {
		return cmp.Or(cmp.Compare(a.currency, b.currency), cmp.Compare(a.code, b.code), bytes.Compare(a.tenantID[:], b.tenantID[:]))
	})
	for _, key := range keys {
		b := r.accounts[key]
		if b.Debit-b.Credit != b.Recomputed {
			r.report.add(Finding{Kind: TrialBalance, TenantID: key.tenantID, Detail: fmt.Sprintf("%s is %s, the orders come to %s",
				key.code, format(b.Debit-b.Credit, key.currency), format(b.Recomputed, key.currency))})
		}
		all := &r.report.TrialBalance
		if last := len(*all) - 1; last < 0 || (*all)[last].Currency != key.currency || (*all)[last].Account != key.code {
			*all = append(*all, Balance{Currency: key.currency, Account: key.code})
		}
		total := &(*all)[len(*all)-1]
		total.Debit += b.Debit
		total.Credit += b.Credit
		total.Recomputed += b.Recomputed
	}
}

// whole looks at what does not belong to one order.
func (r *run) whole(ctx context.Context) error {
	var (
		series  []db.VerifyNumberSeriesListRow
		strays  []db.VerifyStrayLineListRow
		letters db.VerifyDeadLettersRow
	)
	err := r.snapshot(ctx, func(tx pgx.Tx) (err error) {
		series, err = r.queries.VerifyNumberSeriesList(ctx, tx)
		if err == nil {
			strays, err = r.queries.VerifyStrayLineList(ctx, tx, maxStrays)
		}
		if err == nil {
			letters, err = r.queries.VerifyDeadLetters(ctx, tx, consumer)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("read document numbers and stray ledger lines: %w", err)
	}
	for _, s := range series {
		detail := fmt.Sprintf("the %s numbers of %d: %d documents, the highest number is %d, the last given out is %d",
			s.Kind, s.Year, s.Documents, s.Highest, s.LastNumber)
		if s.BrokenAt > 0 {
			detail += fmt.Sprintf("; %d does not follow the one before", s.BrokenAt)
		}
		r.report.add(Finding{Kind: NumberGap, TenantID: s.TenantID, Detail: detail})
	}
	for _, line := range strays {
		r.report.add(Finding{Kind: Phantom, TenantID: line.TenantID, EventID: line.EventID, Detail: "a ledger line without an entry"})
	}
	r.report.DeadLetters.Open, r.report.DeadLetters.Parked = letters.Open, letters.Parked
	return nil
}
