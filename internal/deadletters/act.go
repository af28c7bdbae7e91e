package deadletters

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/postgres"
)

// What can be done with letters.
const (
	Retry   = "retry"
	Discard = "discard"
)

// Act says who does it, and how.
type Act struct {
	By      string // whoever decides
	Reason  string // why a letter is discarded
	Preview bool   // do it all, and take it back
	Limit   int    // letters that may be named at once; 0 means 100
}

// Report is what an act came to, or would come to.
type Report struct {
	Action  string   `json:"action"`
	Preview bool     `json:"preview"`
	Letters []Result `json:"letters"`
	Orders  []Change `json:"orders"`
	More    bool     `json:"more"` // than may be named at once: the oldest were taken
}

// Result is what became of a letter. It is also of letters that were not named,
// and wait with those that were or behind them.
type Result struct {
	Letter
	Named   bool          `json:"named"`
	Outcome inbox.Outcome `json:"outcome"`
	// NewClass and NewDetail are of what failed, or is parked.
	NewClass  inbox.Class `json:"new_class,omitempty"`
	NewDetail string      `json:"new_detail,omitempty"`
	// Stale is an event that is applied although the view of its order is at its
	// version or a later one. Dedupe decides that its document and its entry are
	// made; the view stays as it is.
	Stale       bool  `json:"stale,omitempty"`
	ViewVersion int64 `json:"view_version,omitempty"`
}

// OutcomeNothing is of a letter that is closed already: there is nothing to do.
const OutcomeNothing inbox.Outcome = "nothing to do"

// Change is what there is of an order, before and after.
type Change struct {
	TenantID uuid.UUID `json:"tenant_id"`
	OrderID  uuid.UUID `json:"order_id"`
	Before   Books     `json:"before"`
	After    Books     `json:"after"`
}

// Books counts what there is of an order.
type Books struct {
	Version       int64 `json:"view_version"` // of billing's view; 0 if it has none
	Invoices      int64 `json:"invoices"`
	CreditNotes   int64 `json:"credit_notes"`
	LedgerEntries int64 `json:"ledger_entries"`
	Open          int64 `json:"open_letters"`
	Parked        int64 `json:"parked_letters"`
}

const (
	usualLimit    = 100
	longestReason = 2000
	longestName   = 200
)

// errPreview takes back what a preview did.
var errPreview = errors.New("preview")

// Retry tries letters again, and with each the other open letters of its
// aggregate. A second time changes nothing: what is closed stays so.
func (s *Service) Retry(ctx context.Context, filter Filter, act Act) (Report, error) {
	return s.act(ctx, Retry, filter, act)
}

// Discard decides that letters are not to be applied, for good, and tries those
// that waited behind them.
func (s *Service) Discard(ctx context.Context, filter Filter, act Act) (Report, error) {
	var err error
	if act.Reason, err = checkReason(act.Reason); err != nil {
		return Report{}, err
	}
	return s.act(ctx, Discard, filter, act)
}

func checkReason(reason string) (string, error) {
	reason = strings.TrimSpace(reason)
	switch {
	case strings.IndexFunc(reason, unicode.IsGraphic) < 0:
		return "", ErrReason
	case utf8.RuneCountInString(reason) > longestReason, strings.ContainsRune(reason, 0), !utf8.ValidString(reason):
		return "", ErrReason.Withf("It must be a text of at most %d characters.", longestReason)
	}
	return reason, nil
}

func checkName(by string) error {
	if strings.TrimSpace(by) == "" || utf8.RuneCountInString(by) > longestName || strings.ContainsRune(by, 0) || !utf8.ValidString(by) {
		return fmt.Errorf("who decides needs a name of at most %d characters", longestName)
	}
	return nil
}

// group is the letters that are seen to in one transaction: all of an aggregate,
// or one that is of none.
type group struct {
	consumer          string
	tenantID, orderID uuid.UUID
	named             []Letter
}

func (s *Service) act(ctx context.Context, action string, filter Filter, act Act) (Report, error) {
	report := Report{Action: action, Preview: act.Preview, Letters: []Result{}, Orders: []Change{}}
	limit := act.Limit
	if limit == 0 {
		limit = usualLimit
	}
	switch {
	case filter.Empty():
		return report, ErrSelection.Withf("Say which dead letters.")
	case limit < 1 || limit > LargestPage || len(filter.IDs) > LargestPage:
		return report, ErrSelection.WithFields(failure.Field{Field: "limit", Detail: fmt.Sprintf("must be a whole number from 1 to %d", LargestPage)})
	}
	if err := errors.Join(filter.check(), checkName(act.By)); err != nil {
		return report, err
	}
	if len(filter.IDs) == 0 && len(filter.States) == 0 {
		filter.States = []string{StateOpen}
	}
	letters, err := s.find(ctx, s.pool, filter, uuid.Nil, limit+1)
	if err != nil {
		return report, err
	}
	if report.More = len(letters) > limit; report.More {
		letters = letters[:limit]
	}
	if named := filter.IDs; filter.onlyIDs() && !report.More {
		for _, id := range named {
			if !slices.ContainsFunc(letters, func(l Letter) bool { return l.ID == id }) {
				return report, ErrNotFound.Withf("No dead letter has the id %s.", id)
			}
		}
	}

	for _, g := range groups(letters) {
		results, change, err := s.actOn(ctx, action, g, act)
		if err != nil {
			if len(report.Letters) > 0 && !act.Preview {
				err = after(len(report.Letters), err)
			}
			return report, err
		}
		report.Letters = append(report.Letters, results...)
		if change != nil {
			report.Orders = append(report.Orders, *change)
		}
	}
	return report, nil
}

// after says, with an error, what was done before it and stays done.
func after(letters int, err error) error {
	done := fmt.Sprintf("%d dead letters were seen to before this", letters)
	if refusal, is := errors.AsType[*failure.Error](err); is {
		return refusal.Withf("%s %s.", refusal.Detail, done)
	}
	return fmt.Errorf("%s: %w", done, err)
}

// onlyIDs reports whether nothing but ids names letters, so that one that is not
// found is not there.
func (f Filter) onlyIDs() bool {
	f.IDs = nil
	return f.Empty()
}

func groups(letters []Letter) []*group {
	var all []*group
	type key struct {
		consumer          string
		tenantID, orderID uuid.UUID
	}
	of := make(map[key]*group)
	for _, letter := range letters {
		if letter.TenantID == nil || letter.OrderID == nil {
			all = append(all, &group{consumer: letter.Consumer, named: []Letter{letter}})
			continue
		}
		k := key{letter.Consumer, *letter.TenantID, *letter.OrderID}
		if of[k] == nil {
			of[k] = &group{consumer: k.consumer, tenantID: k.tenantID, orderID: k.orderID}
			all = append(all, of[k])
		}
		of[k].named = append(of[k].named, letter)
	}
	return all
}

// actOn does it for one group, in one transaction.
func (s *Service) actOn(ctx context.Context, action string, g *group, act Act) (results []Result, change *Change, err error) {
	in := s.inboxes[g.consumer]
	if in == nil {
		return nil, nil, ErrSelection.Withf("Nothing here applies what the consumer %q could not.", g.consumer)
	}
	var retried map[uuid.UUID]inbox.Result
	err = postgres.InTx(ctx, s.pool, func(tx pgx.Tx) error {
		w := work{group: g, act: act, tx: tx, inbox: in}
		if err := w.do(ctx, action); err != nil {
			return err
		}
		results, change, retried = w.results, w.change, w.retried
		if act.Preview {
			return errPreview
		}
		return nil
	})
	switch {
	case errors.Is(err, errPreview):
		return results, change, nil
	case postgres.LockTimedOut(err):
		return nil, nil, ErrBusy.Withf("It is dead letter %s or another one of its order.", g.named[0].ID)
	case err != nil:
		return nil, nil, fmt.Errorf("%s dead letter %s: %w", action, g.named[0].ID, err)
	}
	in.ReportRetried(retried)
	return results, change, nil
}

// work is one transaction's.
type work struct {
	*group
	act   Act
	tx    pgx.Tx
	inbox *inbox.Inbox

	open    []db.DeadLetter // of the group, in the order in which they are to be tried
	results []Result
	change  *Change
	retried map[uuid.UUID]inbox.Result
}

func (w *work) do(ctx context.Context, action string) error {
	if err := w.lock(ctx); err != nil {
		return err
	}
	for _, letter := range w.named { // closed before, or since they were looked for
		if w.find(letter.ID) < 0 {
			current, err := db.New().DeadLetterGet(ctx, w.tx, letter.ID)
			if err != nil {
				return fmt.Errorf("read dead letter: %w", err)
			}
			w.results = append(w.results, Result{Letter: letterOf(current), Named: true, Outcome: OutcomeNothing})
		}
	}
	if len(w.results) == len(w.named) {
		return nil
	}

	before, err := w.books(ctx)
	if err != nil {
		return err
	}
	var trying []db.DeadLetter
	if action == Discard {
		trying, err = w.discard(ctx)
	} else {
		trying = w.chosen()
	}
	if err == nil {
		err = w.retry(ctx, trying, before.Version, action)
	}
	if err != nil {
		return err
	}
	after, err := w.books(ctx)
	if err != nil {
		return err
	}
	if w.orderID != uuid.Nil {
		w.change = &Change{TenantID: w.tenantID, OrderID: w.orderID, Before: before, After: after}
	}
	return nil
}

// lock takes the group's letters. The second statement sees what was stored
// behind them while the first waited.
func (w *work) lock(ctx context.Context) (err error) {
	if w.orderID == uuid.Nil {
		w.open, err = db.New().DeadLetterLock(ctx, w.tx, []uuid.UUID{w.named[0].ID})
	} else if _, err = db.New().DeadLetterLockAggregate(ctx, w.tx, w.consumer, &w.tenantID, &w.orderID); err == nil {
		w.open, err = db.New().DeadLetterListOpen(ctx, w.tx, w.consumer, &w.tenantID, &w.orderID)
	}
	if err != nil {
		return fmt.Errorf("lock dead letters: %w", err)
	}
	return nil
}

func (w *work) find(id uuid.UUID) int {
	return slices.IndexFunc(w.open, func(row db.DeadLetter) bool { return row.ID == id })
}

func (w *work) isNamed(id uuid.UUID) bool {
	return slices.ContainsFunc(w.named, func(letter Letter) bool { return letter.ID == id })
}

// chosen is the letters to try: what is named, and all that holds back the
// aggregate if one of that is.
func (w *work) chosen() []db.DeadLetter {
	holding := slices.ContainsFunc(w.open, func(row db.DeadLetter) bool {
		return w.isNamed(row.ID) && inbox.Class(row.Class).Parks()
	})
	var chosen []db.DeadLetter
	for _, row := range w.open {
		if w.isNamed(row.ID) || holding && inbox.Class(row.Class).Parks() {
			chosen = append(chosen, row)
		}
	}
	return chosen
}

// discard closes what is named, and returns what waits behind nothing then.
func (w *work) discard(ctx context.Context) (released []db.DeadLetter, err error) {
	for _, row := range w.open {
		if !w.isNamed(row.ID) {
			if inbox.Class(row.Class).Parks() {
				released = append(released, row)
			}
			continue
		}
		if err := w.close(ctx, row, StateDiscarded); err != nil {
			return nil, err
		}
		if err := w.decide(ctx, row, "discarded", inbox.Result{Outcome: inbox.OutcomeDiscarded}, &w.act.Reason); err != nil {
			return nil, err
		}
		w.results = append(w.results, Result{Letter: letterOf(row), Named: true, Outcome: inbox.OutcomeDiscarded})
	}
	if len(released) > 0 && inbox.Class(released[0].Class) != inbox.ClassParked {
		return nil, nil // what they wait for is still there
	}
	return released, nil
}

// retry tries letters and writes down what became of each.
func (w *work) retry(ctx context.Context, rows []db.DeadLetter, viewVersion int64, action string) error {
	if len(rows) == 0 {
		return nil
	}
	letters := make([]inbox.Letter, len(rows))
	for i, row := range rows {
		record, err := recordOf(row)
		if err != nil {
			return err
		}
		letters[i] = inbox.Letter{ID: row.ID, Record: record}
	}
	became, err := w.inbox.RetryTx(ctx, w.tx, letters)
	if err != nil {
		return err
	}
	w.retried = became
	for _, row := range rows {
		result, known := became[row.ID]
		if !known {
			return fmt.Errorf("nobody says what became of dead letter %s", row.ID)
		}
		if err := w.write(ctx, row, result); err != nil {
			return err
		}
		w.results = append(w.results, Result{
			Letter: letterOf(row), Named: action == Retry && w.isNamed(row.ID), Outcome: result.Outcome,
			NewClass: result.Fault.Class, NewDetail: result.Fault.Detail,
			Stale:       result.Outcome == inbox.OutcomeApplied && row.AggregateVersion != nil && *row.AggregateVersion <= viewVersion,
			ViewVersion: viewVersion,
		})
	}
	return nil
}

// write closes a letter, or says what is wrong with it this time. One that was
// parked and stays so was not tried, and nothing is to be said of it.
func (w *work) write(ctx context.Context, row db.DeadLetter, result inbox.Result) error {
	switch result.Outcome {
	case inbox.OutcomeApplied, inbox.OutcomeDuplicate, inbox.OutcomeSkipped:
		if err := w.close(ctx, row, StateResolved); err != nil {
			return err
		}
	case inbox.OutcomeDiscarded:
		if err := w.close(ctx, row, StateDiscarded); err != nil {
			return err
		}
	case inbox.OutcomeParked:
		if inbox.Class(row.Class).Parks() {
			return nil
		}
		fallthrough
	case inbox.OutcomeFailed:
		changed, err := db.New().DeadLetterFail(ctx, w.tx, string(result.Fault.Class), result.Fault.Detail, row.ID)
		if err != nil {
			return fmt.Errorf("write down how dead letter %s failed: %w", row.ID, err)
		}
		if changed != 1 {
			return fmt.Errorf("write down how dead letter %s failed: it is not open", row.ID)
		}
	}
	return w.decide(ctx, row, "retried", result, nil)
}

func (w *work) close(ctx context.Context, row db.DeadLetter, state string) error {
	closed, err := db.New().DeadLetterClose(ctx, w.tx, state, row.ID)
	if err != nil {
		return fmt.Errorf("close dead letter %s: %w", row.ID, err)
	}
	if closed != 1 {
		return fmt.Errorf("close dead letter %s: it is not open", row.ID)
	}
	return nil
}

func (w *work) decide(ctx context.Context, row db.DeadLetter, action string, result inbox.Result, reason *string) error {
	params := db.DeadLetterDecisionInsertParams{
		ID: uuid.Must(uuid.NewV7()), DeadLetterID: row.ID, Action: action, Outcome: string(result.Outcome),
		Class: pointer(string(result.Fault.Class)), Detail: pointer(result.Fault.Detail), Reason: reason, DecidedBy: w.act.By,
	}
	if err := db.New().DeadLetterDecisionInsert(ctx, w.tx, params); err != nil {
		return fmt.Errorf("write decision: %w", err)
	}
	return nil
}

func (w *work) books(ctx context.Context) (Books, error) {
	if w.orderID == uuid.Nil {
		return Books{}, nil
	}
	row, err := db.New().DeadLetterBooks(ctx, w.tx, w.tenantID, w.orderID)
	if err != nil {
		return Books{}, fmt.Errorf("count what there is of the order: %w", err)
	}
	return Books(row), nil
}
